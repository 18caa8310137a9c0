// Swagger UI with the document of this service. It sends requests to this service alone.

window.SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#viewer",
  deepLinking: true,
  defaultModelsExpandDepth: -1,
  docExpansion: "list",
  validatorUrl: null,
});
